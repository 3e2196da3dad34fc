"""Drafters: one file each, named after the method; `registry` finds them, `base` says what they owe."""
