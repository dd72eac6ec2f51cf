"""Small layers that more than one target, tower or drafter uses."""
