"""The version, where everything can read it: caches on disk are keyed by it."""

VERSION = "0.1.0"
