"""Attention over pages: `reference` defines what is correct, the files beside it are faster."""
