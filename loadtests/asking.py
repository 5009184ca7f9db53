"""Asks a router for /health again and again, and prints how long each took, in milliseconds.

What it takes bounds the time for which the router's event loop was busy. It is a process of its
own: in a thread of the clients' process it would measure how busy these are.

    python -m loadtests.asking http://127.0.0.1:8080      until SIGTERM
"""

from __future__ import annotations

import http.client
import signal
import sys
import time
from collections.abc import Sequence
from typing import Final
from urllib.parse import urlsplit

_ASK_S: Final = 0.2
_ASK_LIMIT_S: Final = 10.0


def main(argv: Sequence[str]) -> int:
    """Ask and print until SIGTERM."""
    (url,) = argv
    address = urlsplit(url)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        connection = http.client.HTTPConnection(
            str(address.hostname), address.port, timeout=_ASK_LIMIT_S
        )
        began_s = time.perf_counter()
        connection.request("GET", "/health")
        connection.getresponse().read()
        print(f"{(time.perf_counter() - began_s) * 1000:.3f}", flush=True)
        connection.close()
        time.sleep(_ASK_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
