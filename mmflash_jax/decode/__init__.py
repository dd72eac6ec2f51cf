"""The fused decoding loop: prefill, propose, verify, accept, commit."""
