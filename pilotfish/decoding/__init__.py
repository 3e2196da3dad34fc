"""The method itself, pure: no models, no caches, no clocks, no random state."""
