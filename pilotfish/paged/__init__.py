"""Paged KV of our own, one class for target and draft models; nothing here decides what to compute."""
