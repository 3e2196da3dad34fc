"""``python -m pilotfish.bench.serving``: what the server promises, tried with a real process and real sockets.

    load       streams that never pause: no error, each text the one that its request gets alone, memory flat
    vanish     clients that hang up at random moments: no page, task, thread or socket is left
    stubborn   one that reads a byte a second, ones that send half of a header or of a body: nobody else waits
    overhead   tokens per second through HTTP beside the engine's own

It does not know the package's tests, which say the same of fakes. The one trick: the server is a process of ours with
two routes more (`host`): what it holds, and the engine's own speed, measured in the engine's thread between streams.
"""
