"""The one loop, and what it asks: a scheduler that holds no tensors, a judge that schedules nothing."""
