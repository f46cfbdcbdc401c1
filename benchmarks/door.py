"""A door before a server: bytes pass in both directions until somebody kills it, and a new one opens again.

python -m benchmarks.door PORT SERVER_PORT
"""

from __future__ import annotations

import socket
import sys
import threading

CHUNK_BYTES = 1 << 16


def _pass(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(CHUNK_BYTES):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        return


def _serve(client: socket.socket, server_port: int) -> None:
    try:
        server = socket.create_connection(("127.0.0.1", server_port))
    except OSError:
        client.close()
        return
    with client, server:
        back = threading.Thread(target=_pass, args=(server, client), daemon=True)
        back.start()
        _pass(client, server)
        back.join()


def main(port: int, server_port: int) -> None:
    """Stand before a server for ever."""
    with socket.create_server(("127.0.0.1", port), reuse_port=False) as listener:
        print("open", flush=True)
        while True:
            client, _ = listener.accept()
            threading.Thread(target=_serve, args=(client, server_port), daemon=True).start()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
