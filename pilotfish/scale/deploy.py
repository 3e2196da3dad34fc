"""On Ray Serve: deployments of engines and of fronts before them, and `serve_on_ray`, which runs them until Ctrl-C.

It does not know how requests are answered. The one trick: an engine is asked through a handle of Serve's, by the front
and not by Serve's proxy, for a proxy that has lost a replica can only say 500, or nothing.

    client -> Serve's proxy -> Front -> handle, `ConversationRouter` -> Replica (the server's app, one engine thread)
"""

import contextlib
import logging
import os
import signal
import socket
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping
from typing import Any

import click
import ray
from ray import serve
from ray.exceptions import RayActorError, RayError
from ray.serve.config import HTTPOptions, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException
from ray.serve.schema import LoggingConfig
from starlette.types import Message

from ..errors import OptionError, PilotfishError
from ..server.options import ServeOptions
from ..server.run import bind, warn_of_open_door
from .environment import address
from .front import BusyError, Front, LostError
from .options import ScaleOptions
from .recipe import Recipe
from .replica import Makes, Replica, Request
from .router import ConversationRouter

log = logging.getLogger(__name__)
NAME, ENGINES, FRONTS = "pilotfish", "engine", "front"
_SPARE = 8  # requests for health and metrics that an engine takes when its seats are full
_HEALTH_PERIOD = 2.0  # seconds


class Engine:
    """A replica of the deployment."""

    async def __init__(self, recipe: Makes, options: ServeOptions):  # type: ignore[misc]  # on the event loop
        self._replica = Replica(recipe, options)

    async def ask(self, request: Request, body: bytes) -> AsyncGenerator[list[Message]]:
        """`Replica.ask`."""
        async with contextlib.aclosing(self._replica.ask(request, body)) as messages:
            async for some in messages:
                yield some

    async def metrics(self) -> tuple[str, str]:
        """This replica's name and its metrics."""
        return serve.get_replica_context().replica_id.unique_id, self._replica.metrics()

    async def process(self) -> tuple[str, int]:
        """This replica's name and the id of its process."""
        return serve.get_replica_context().replica_id.unique_id, os.getpid()

    def check_health(self) -> None:
        """Serve replaces a replica that raises here."""
        self._replica.check_health()

    def __del__(self) -> None:
        if hasattr(self, "_replica"):
            self._replica.close()


class _Handle:
    """`front.Replicas` by way of a handle."""

    def __init__(self, handle: Any):
        self._handle = handle

    async def ask(self, request: Request, body: bytes, conversation: str | None) -> AsyncGenerator[list[Message]]:
        answers = self._handle.options(stream=True, session_id=conversation or "").ask.remote(request, body)
        last: list[Message] | None = None  # held back until the call has ended: the client, once it has all, ends ours
        ended = False
        try:
            async for some in answers:
                if some[-1]["type"] == "http.response.body" and not some[-1].get("more_body", False):
                    last = some
                else:
                    yield some
            ended = True
        except (RayActorError, DeploymentUnavailableError) as error:
            ended = True
            if last is None:
                raise LostError(str(error).partition("\n")[0]) from error
        except BackPressureError as error:
            ended = True
            raise BusyError from error
        finally:
            if not ended:
                answers.cancel()
        if last is not None:
            yield last

    async def metrics(self) -> Mapping[str, str]:
        return dict(await self._handle.broadcast("metrics").results_async())


class FrontDoor:
    """A replica of the deployment that Serve's proxies reach."""

    def __init__(self, engines: Any, options: ServeOptions):
        self._front = Front(_Handle(engines), options)

    def __serve_build_asgi_app__(self) -> Front:
        return self._front


def application(recipe: Makes, options: ServeOptions, scale: ScaleOptions, num_seats: int | None = None) -> Any:
    """What `serve.run` takes. num_seats: completions that an engine runs at once; the recipe's if it says so."""
    if num_seats is None:
        assert isinstance(recipe, Recipe)
        num_seats = recipe.num_seats
    many: dict[str, Any] = {"num_replicas": scale.replicas}
    if scale.min_replicas is not None:
        bounds = {"min_replicas": scale.min_replicas, "max_replicas": scale.max_replicas}
        many = {"autoscaling_config": {**bounds, "target_ongoing_requests": num_seats}}
    told = LoggingConfig(enable_access_log=options.access_log)
    engines = serve.deployment(
        Engine,
        name=ENGINES,
        max_ongoing_requests=num_seats + _SPARE,
        max_queued_requests=options.max_queue,
        ray_actor_options={"num_cpus": scale.cpus_per_replica, "num_gpus": scale.gpus_per_replica},
        request_router_config=RequestRouterConfig(
            request_router_class=ConversationRouter, request_router_kwargs={"num_seats": num_seats}
        ),
        graceful_shutdown_timeout_s=options.drain_timeout,
        health_check_period_s=_HEALTH_PERIOD,
        logging_config=told,
        **many,
    )
    fronts = serve.deployment(
        serve.ingress()(FrontDoor),
        name=FRONTS,
        num_replicas=scale.fronts,
        max_ongoing_requests=options.max_connections,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=options.drain_timeout,
        logging_config=told,
    )
    return fronts.bind(engines.bind(recipe, options), options)


def serve_on_ray(recipe: Makes, options: ServeOptions, scale: ScaleOptions, num_seats: int | None = None) -> None:
    """Serve until a signal comes; the first lets running requests end, the second does not.

    Raises OptionError for a port that is in use or a cluster that cannot be reached.
    """
    if not options.port:
        raise OptionError("port 0: with --ray the port must be named, since each machine listens on it")
    if options.trace is not None:
        raise OptionError("trace: with --ray there is no one file for all engines; leave it out")
    with bind(options.host, options.port) as free:
        host = free.getsockname()[0]
    with cluster(scale):
        app = application(recipe, options, scale, num_seats)
        stopped = threading.Event()
        with _signals(stopped):
            try:
                serve.start(http_options=HTTPOptions(host=options.host, port=options.port))
                serve.run(app, name=NAME, route_prefix="/")
            except (RayServeException, RuntimeError) as error:
                raise PilotfishError(f"the engines did not start: {error}") from error
            click.echo(f"serving at http://{options.host}:{options.port}/v1 on {_told(scale)}", err=True)
            warn_of_open_door(options, host)
            stopped.wait()
            click.echo("running requests are ending; once more stops them", err=True)
            serve.shutdown()


def _told(scale: ScaleOptions) -> str:
    if scale.min_replicas is not None:
        return f"{scale.min_replicas} to {scale.max_replicas} engines"
    return f"{scale.replicas} engine{'s' if scale.replicas > 1 else ''}"


@contextlib.contextmanager
def _signals(stopped: threading.Event) -> Iterator[None]:
    """The first SIGTERM or Ctrl-C sets the event, the next one ends the process."""

    def stop(_signal: int, _frame: Any) -> None:
        if stopped.is_set():
            os._exit(1)
        stopped.set()

    before = {one: signal.signal(one, stop) for one in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


def _look_for(place: str) -> None:
    """Ray itself would look for a machine that is not there for minutes. Raises OptionError if it is not."""
    host, colon, port = place.rpartition(":")
    if colon and port.isdigit() and "://" not in place:
        try:
            socket.create_connection((host, int(port)), timeout=5).close()
        except OSError as error:
            raise OptionError(f"ray_address {place!r}: nothing answers there: {error}") from error


@contextlib.contextmanager
def cluster(scale: ScaleOptions) -> Iterator[None]:
    """A connection to the cluster, or a cluster of our own on this machine, for us alone (`environment`).

    Nothing is reported to anybody, and no dashboard is started. Raises OptionError if there is no cluster there.
    """
    if ray.is_initialized():  # the caller's, and the caller's to end
        yield
        return
    place = address(scale)
    _look_for(place)
    own: dict[str, Any] = {"include_dashboard": False, "_node_ip_address": "127.0.0.1"} if place == "local" else {}
    try:
        ray.init(address=place, log_to_driver=False, configure_logging=False, **own)
    except (ConnectionError, ValueError, RayError) as error:
        raise OptionError(f"ray_address {place!r}: no Ray cluster could be reached there: {error}") from error
    try:
        _check_room(scale, alone=place == "local")
        yield
    finally:
        ray.shutdown()


def _check_room(scale: ScaleOptions, *, alone: bool) -> None:
    """Ray waits for ever, and silently, for cores that nobody has. Raises OptionError if nobody will; else says it.

    alone: whether the cluster is this machine, which does not grow.
    """
    num_engines = scale.min_replicas or scale.replicas
    free, whole = ray.available_resources(), ray.cluster_resources()
    for kind, name, each in (
        ("CPU", "cpus_per_replica", scale.cpus_per_replica),
        ("GPU", "gpus_per_replica", scale.gpus_per_replica),
    ):
        needed = num_engines * each
        if alone and needed > whole.get(kind, 0):
            told = f"{num_engines} x {name} {each:g} is more than the {whole.get(kind, 0):g} that this machine has"
            raise OptionError(f"{told}; lower one of them, or name a cluster with --ray-address")
        if needed > free.get(kind, 0):
            click.echo(f"waiting for {needed:g} {kind}; the cluster has {free.get(kind, 0):g} free", err=True)
