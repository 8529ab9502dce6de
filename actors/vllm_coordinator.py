"""The coordinator of vLLM engines as an actor, which Ray restarts when its process or node dies.

    kvcache vllm-coordinator --ray NAME           block server of an engine, and its scheduler
                  │ makes                           │ start, once and when it is silent
                  ▼                                 ▼
      VllmCoordinatorActor ◀───place()─── python -m actors.vllm_coordinator NAME SECONDS
      IndexServer, StreamProxy ◀──ZeroMQ── block server, scheduler

It listens at a free port of the node on which it runs, so engines ask Ray where that is. Its keys
are arguments of the actor, so they survive a restart. What it knows is soft: engines tell it again.

Ray is imported where it is used: the process that asks says so if there is none.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

from actors.names import OUR_LOGGERS, RAY_NAMESPACE, vllm_coordinator_name
from kvcache.base.curve import CurveKeys, generate_curve_keys
from kvcache.base.errors import (
    AlreadyRunningError,
    ConfigurationError,
    DeadlineError,
    KVCacheError,
    NotRunningError,
)
from kvcache.base.logs import get_logger, log_to_stderr
from kvcache.sharing.access import IndexPlace
from kvcache.sharing.index_server import IndexServer

if TYPE_CHECKING:
    from kvcache.events.stream_proxy import StreamProxy

logger = get_logger(__name__)

POLL_S = 0.1

SPARE_S = 5.0
"""What `main` leaves of its time, to say that there was no answer."""


class VllmCoordinatorActor:
    """Serves an index, and events if it has ports for them. A named, detached actor that Ray
    restarts without limit; calls are never retried."""

    def __init__(self, keys: CurveKeys, event_ports: tuple[int, int] | None) -> None:
        """Listen on this node. `event_ports`: of the live stream and of requests for missed events.

        Serves without events if these ports are taken: after a restart they may be, and an actor
        whose `__init__` raises is dead permanently.
        """
        from actors.connect import this_node

        log_to_stderr(OUR_LOGGERS)
        host = this_node().host
        self._keys = keys
        self._host = f"[{host}]" if ":" in host else host
        self._problem: ConfigurationError | None = None
        proxy = None if event_ports is None else self._open_proxy(*event_ports)
        self._server = IndexServer(f"tcp://{self._host}:0", keys, proxy=proxy)
        self._server.start()
        if proxy is not None:
            proxy.start()

    def place(self, must_publish: bool = False) -> dict[str, Any]:
        """Return where it listens, and its keys, as values for JSON.

        With `must_publish`, raises ConfigurationError if its ports for events are taken.
        """
        if must_publish and self._problem is not None:
            raise self._problem
        return IndexPlace(self._server.endpoint, self._keys).to_plain()

    def _open_proxy(self, live: int, replay: int) -> StreamProxy | None:
        from kvcache.events.stream_proxy import StreamProxy

        places = f"tcp://{self._host}:{live}", f"tcp://{self._host}:{replay}"
        try:
            return StreamProxy(*places, self._keys)
        except ConfigurationError as error:
            logger.error("%s", error)
            self._problem = error
            return None


def start_vllm_coordinator(
    name: str, event_ports: tuple[int, int] | None, timeout_s: float
) -> IndexPlace:
    """Start the actor of this name, and return where it listens. It outlives this process.

    Raises AlreadyRunningError if it runs, StartupError if it cannot start, DeadlineError if it does
    not answer in time; then nothing keeps running.
    """
    import ray
    from ray.exceptions import RayError

    from actors.connect import end_actors, is_actor_known
    from actors.workers.making import code_options

    make_remote: Any = ray.remote
    try:
        actor = (
            make_remote(VllmCoordinatorActor)
            .options(
                name=vllm_coordinator_name(name),
                namespace=RAY_NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                max_task_retries=0,
                num_cpus=0,
                **code_options(),
            )
            .remote(generate_curve_keys(), event_ports)
        )
    except ValueError as error:
        if not is_actor_known(vllm_coordinator_name(name)):
            raise
        raise AlreadyRunningError(
            f"a coordinator named {name!r} runs on this Ray: use it, end it with kvcache "
            f"vllm-coordinator --ray {name} --stop, or choose another name"
        ) from error
    try:
        return IndexPlace.of_plain(ray.get(actor.place.remote(True), timeout=timeout_s))
    except BaseException as error:
        end_actors([actor])
        if isinstance(error, RayError):
            from actors.clusters.launch import startup_error

            raise startup_error(f"coordinator {name}", "start", error) from error
        raise


def stop_vllm_coordinator(name: str, timeout_s: float) -> None:
    """End the actor of this name; return when it is gone.

    Raises NotRunningError if there is none, DeadlineError if it is still known after `timeout_s`.
    """
    from actors.clusters.placement import wait_until
    from actors.connect import end_actors, is_actor_known

    end_actors([_find(name)])
    if not wait_until(lambda: not is_actor_known(vllm_coordinator_name(name)), timeout_s):
        raise DeadlineError(
            f"coordinator {name} has not ended within {timeout_s:g} s: look at `ray status`"
        )


def ask_place(name: str, timeout_s: float) -> IndexPlace:
    """Return where the coordinator of this name listens, and its keys. Waits for one that Ray is
    restarting. The process must be connected to Ray.

    Raises NotRunningError if there is none, DeadlineError without an answer.
    """
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError

    give_up_s = time.monotonic() + timeout_s
    while True:
        call = _find(name).place.remote()
        try:
            left_s = max(0.0, give_up_s - time.monotonic())
            return IndexPlace.of_plain(ray.get(call, timeout=left_s))
        except (GetTimeoutError, RayActorError) as error:
            if time.monotonic() >= give_up_s:
                raise DeadlineError(
                    f"the coordinator named {name!r} gives no answer within {timeout_s:g} s: look "
                    "at `ray status`, and at the log of its actor"
                ) from error
            time.sleep(POLL_S)


def _find(name: str) -> Any:
    from actors.connect import find_actor

    actor = find_actor(vllm_coordinator_name(name))
    if actor is None:
        raise NotRunningError(
            f"no coordinator named {name!r} runs on this Ray: start it with kvcache "
            f"vllm-coordinator --ray {name}"
        )
    return actor


def main(name: str, timeout_s: float) -> None:
    """Print where the coordinator of this name listens, and its keys, or what is wrong and the
    remedy: a line of JSON. Ends after `timeout_s` at the latest."""
    signal.alarm(max(1, int(timeout_s)))
    problem = ""
    try:
        from actors.cli.clusters import ray_session

        with ray_session(may_start=False):
            place = ask_place(name, max(1.0, timeout_s - SPARE_S))
            print(json.dumps({"place": place.to_plain()}), flush=True)
    except ImportError as error:
        problem = (
            f"Ray cannot be imported ({error}): install it in the engine's environment, in the "
            "version that the cluster has, or set coordinator.address instead"
        )
    except KVCacheError as error:
        problem = str(error)
    except Exception as error:
        problem = f"Ray cannot be asked: {type(error).__name__}: {error}".splitlines()[0]
    if problem:
        print(json.dumps({"problem": problem}))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
