"""An engine that counts: token i of its text is the first id plus i. Variants may err, die, hang or say other words."""

import os
import pathlib
import time
from collections.abc import Callable
from typing import Any


class Worker:
    def prepare(self, settings: dict[str, Any]) -> None:
        (pathlib.Path(settings["cache"]) / f"made for {settings['weights']}").touch()

    def load(self, settings: dict[str, Any]) -> dict[str, Any]:
        print("noise on stdout must not disturb the protocol")
        if settings["weights"] == "unloadable":
            raise RuntimeError("no such weights\nand a second line")
        self.settings = settings
        return {"version": "1.2", "precision": settings["weights"]}

    def run(self, variant: str, ids: list[int], max_tokens: int, emit: Callable[[list[int]], None]) -> None:
        own = self.settings["variants"][variant]
        real = max_tokens > 8  # not the warm-up
        if own.get("fails") and real:
            raise ValueError("cannot")
        if own.get("dies") and real and not pathlib.Path(own["dies"]).exists():
            print("last words")
            os._exit(3)
        if own.get("hangs") and real:
            time.sleep(60)
        if own.get("interrupts") and real and ids[0] >= 20:
            import signal

            os.kill(own["interrupts"], signal.SIGINT)
            time.sleep(60)
        text = [ids[0] + i + own.get("other", 0) * (ids[0] >= 20) for i in range(max_tokens)]
        emit(text[:1])
        for i in range(1, max_tokens, own.get("burst", 1)):
            time.sleep(0.001)
            emit(text[i : i + own.get("burst", 1)])
