"""The command `dashboard`: the experiments of a store in a browser, while they run."""

from __future__ import annotations

from contextlib import closing, suppress
from typing import Annotated

import typer

from fedpick.cli.experiments import StoreOption
from fedpick.experiments import DEFAULT_STORE

__all__ = ["dashboard"]


def dashboard(
    store: StoreOption = DEFAULT_STORE,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free port.")] = 8765,
    host: Annotated[
        str, typer.Option(help="The address to listen on. Other machines reach it only if you change it; see the docs.")
    ] = "127.0.0.1",
) -> None:
    """Show the experiments of a store in a browser while they run. Ctrl-C ends it; it only reads."""
    from fedpick.dashboard import server
    from fedpick.experiments.store import open_store

    token = None if server.is_loopback(host) else server.new_token()
    with closing(open_store(store)) as opened, suppress(KeyboardInterrupt):

        def ready(link: str) -> None:
            typer.echo(f"Dashboard: {link}")
            if token is not None:
                typer.echo("Anybody with this link can read the store. The connection is not encrypted.", err=True)

        server.serve(opened, host=host, port=port, token=token, ready=ready)
