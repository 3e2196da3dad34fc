"""The OpenAI-compatible server: one engine thread, one event loop, and translations between them.

It does not know how text is made: `engine_thread` drives the same `Engine.step` as everything else. The one trick:
streamed or whole, an answer is the same sequence of deltas, so the two cannot disagree.
"""
