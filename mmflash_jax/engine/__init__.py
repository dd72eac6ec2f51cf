"""Serving on the host side: prompts in, text out. No array mathematics."""
