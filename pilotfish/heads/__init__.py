"""Trained heads: their architectures and their files; drafters and training share them."""
