"""How the demo's target was trained; needs torch and transformers, which the rest does not."""
