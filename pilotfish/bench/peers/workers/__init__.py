"""One script per engine, each run by `serve.py` under that engine's own interpreter, where pilotfish is not installed.

A script is one file with a class ``Worker``: ``prepare`` makes files that are made once, ``load`` loads, ``run``
decodes one prompt and calls ``emit`` with new token ids as they come.
"""
