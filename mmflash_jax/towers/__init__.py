"""Image encoders, one file each. A target names the tower it uses."""
