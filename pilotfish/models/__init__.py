"""Models behind one small protocol; see `base`."""
