"""Puts the parts of a router together by its settings, opens them, and drains them."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from importlib.metadata import version
from typing import Self

import structlog
from aiohttp import web

from kvway_core import logs
from kvway_core.blocks import Namespace
from kvway_core.clock import Clock
from kvway_core.lifecycle import Supervisor, local_url, start_site
from kvway_core.metrics import new_registry
from kvway_core.prompts import PromptEncoder
from kvway_core.web import HttpLimits, make_runner, new_app
from kvway_router.aborts import Aborts
from kvway_router.admin import AdminHandlers
from kvway_router.admin_replicas import ReplicaAdmin
from kvway_router.admin_views import MAX_BODY_BYTES, AdminViews
from kvway_router.admission import Admission
from kvway_router.attempts import Attempts, Limits
from kvway_router.chooser import Chooser
from kvway_router.decisions import DecisionStore
from kvway_router.discovery import Discovery, DnsName
from kvway_router.dispatch import Dispatcher
from kvway_router.feed_metrics import FeedCollector
from kvway_router.feed_source import EventsOption
from kvway_router.fleet import Fleet, Traffic
from kvway_router.handlers import ApiHandlers, add_request_id
from kvway_router.index import BlockIndex
from kvway_router.insight import Insight
from kvway_router.intake import Intake
from kvway_router.ledger import Ledger
from kvway_router.metrics import FleetCollector, RouterMetrics
from kvway_router.playground import Playground
from kvway_router.policies.registry import POLICIES, first_state
from kvway_router.policy import PolicyParams
from kvway_router.prefixes.watch import PrefixCollector, PrefixWatch
from kvway_router.proxy import ReplicaClient
from kvway_router.reader_pool import ReaderPool
from kvway_router.reading import ServedModel
from kvway_router.recent import RecentPrompts
from kvway_router.reload import Reloaded, reloaded
from kvway_router.replica import ReplicaOptions
from kvway_router.replicas import ReplicaSet
from kvway_router.rests import RestReader
from kvway_router.settings import RouterSettings
from kvway_router.snapshot_keeper import SnapshotKeeper
from kvway_router.tracing import Tracer
from kvway_router.trips import Trip, TripLog

_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where a router listens."""

    api: str
    admin: str


class Router:
    """All parts of one router, put together; serves while it is open as a context manager.

    Args:
        settings: Its options.
        name: Served model name.
        encoder: Tokenizer and chat template of the model.
        supervisor: Owner of the tasks that watch and find replicas.
        clock: Tells the time.
        reread: Reads the settings again, for `reload`; without it they stay as they are.
    """

    def __init__(
        self,
        settings: RouterSettings,
        *,
        name: str,
        encoder: PromptEncoder,
        supervisor: Supervisor,
        clock: Clock,
        reread: Callable[[], RouterSettings] | None = None,
    ) -> None:
        """Puts the parts together; nothing is opened yet."""
        self._settings = settings
        self._reread = reread or (lambda: self._settings)
        self._encoder = encoder
        self._supervisor = supervisor
        params = PolicyParams(
            host_token_s=settings.host_reload_us * 1e-6,
            disk_token_s=settings.disk_reload_us * 1e-6,
        )
        policy = POLICIES[settings.policy]
        self._tracer = (
            Tracer(settings.trace_endpoint, share=settings.trace_share, version=version("kvway"))
            if settings.trace_endpoint is not None
            else None
        )
        model = ServedModel(
            name=name, encoder=encoder, namespace=Namespace(name, settings.block_size)
        )
        self.index = index = BlockIndex(
            max_blocks_per_replica=settings.max_replica_blocks,
            max_bytes=settings.max_index_bytes,
        )
        ledger = Ledger(clock=clock, params=params, block_size=settings.block_size)
        self.replicas = ReplicaSet(
            index=index,
            ledger=ledger,
            clock=clock,
            model=name,
            block_size=settings.block_size,
            options=ReplicaOptions(
                interval_s=settings.probe_interval_s,
                timeout_s=settings.probe_timeout_s,
                slots=settings.replica_slots,
                num_routers=settings.processes,
                kv_events=tuple(map(EventsOption.parse, settings.kv_events)),
            ),
        )
        self._keeper = (
            SnapshotKeeper(settings.index_snapshot, index=index, replicas=self.replicas)
            if settings.index_snapshot is not None
            else None
        )
        self._discovery = Discovery(
            settings.replica,
            _names(settings),
            on_change=self.replicas.set_replicas,
        )
        self.readers = ReaderPool(
            num_threads=settings.reader_threads, max_waiting=settings.max_waiting_prompts
        )
        self._parsers = ReaderPool(
            num_threads=settings.reader_threads, max_waiting=settings.max_waiting_prompts
        )
        self._rests = RestReader()
        self.aborts = Aborts()
        self._client = ReplicaClient(connect_timeout_s=settings.connect_timeout_s)
        traffic = Traffic()
        fleet = Fleet(
            model=name, replicas=self.replicas, index=index, ledger=ledger, traffic=traffic
        )
        self.decisions = DecisionStore(max_records=settings.max_decisions)
        metrics = RouterMetrics(
            new_registry("router", version=version("kvway")), reasons=policy.reasons
        )
        self.admission = Admission(
            room=self._room,
            slots=lambda: sum(map(self.replicas.slots, self.replicas.ready())),
            clock=clock,
            max_waiting=settings.max_queued,
            timeout_s=settings.queue_timeout_s,
        )
        self.replicas.watcher.on_change = self.admission.look
        self._prefixes = PrefixWatch(
            lambda text: len(encoder.encode_text(text, add_special_tokens=False)), clock=clock
        )

        recent = RecentPrompts(max_ceiling_bytes=settings.max_index_bytes // 4)
        self.insight = Insight(
            fleet=fleet,
            index=index,
            recent=recent,
            admission=self.admission,
            clock=clock,
            block_size=settings.block_size,
        )

        def ended(trip: Trip) -> None:
            metrics.observe(trip)
            if self._tracer is not None:
                self._tracer.ended(trip)
            self.insight.ended(trip)
            self._prefixes.offer(trip)

        chooser = Chooser(
            policy,
            first_state(policy, seed=secrets.randbits(64)),
            params,
            replicas=self.replicas,
            index=index,
            ledger=ledger,
            block_size=settings.block_size,
        )

        self._attempts = Attempts(
            replicas=self.replicas,
            index=index,
            ledger=ledger,
            rests=self._rests,
            client=self._client,
            aborts=self.aborts,
            limits=_attempt_limits(settings),
            block_size=settings.block_size,
            tracer=self._tracer,
        )
        self.dispatcher = Dispatcher(
            intake=Intake(
                model=model,
                index=index,
                readers=self.readers,
                parsers=self._parsers,
                rests=self._rests,
                max_model_len=self.max_model_len,
                timeout_s=settings.tokenize_timeout_s,
            ),
            admission=self.admission,
            chooser=chooser,
            attempts=self._attempts,
            replicas=self.replicas,
            ledger=ledger,
            trips=TripLog(
                decisions=self.decisions,
                traffic=traffic,
                recent=recent,
                observe=ended,
                clock=clock,
            ),
            block_size=settings.block_size,
            max_attempts=settings.max_attempts,
            timeout_s=settings.request_timeout_s,
        )
        metrics.registry.register(
            FleetCollector(
                fleet=fleet,
                readers=self.readers,
                rests=self._rests,
                texts=encoder.texts,
                running=self.dispatcher.running,
                admission=self.admission,
                rotation=self.replicas.rotation,
            )
        )
        metrics.registry.register(FeedCollector(self.replicas))
        metrics.registry.register(PrefixCollector(self._prefixes))
        api = ApiHandlers(
            dispatcher=self.dispatcher,
            replicas=self.replicas,
            metrics=metrics,
            max_model_len=self.max_model_len,
            model=name,
            created_s=int(clock.time()),
            tracer=self._tracer,
        )
        self._api = _runner(api.routes(), settings.http_limits)
        self._api.app.on_response_prepare.append(api.close_if_leaving)
        admin = AdminHandlers(decisions=self.decisions, fleet=fleet, prefixes=self._prefixes)
        views = AdminViews(
            insight=self.insight,
            playground=Playground(
                model=model,
                readers=self.readers,
                chooser=chooser,
                max_model_len=self.max_model_len,
            ),
            api=api,
        )
        changes = ReplicaAdmin(
            discovery=self._discovery, replicas=self.replicas, reload=self.reload
        )
        self._admin = _runner(
            [*admin.routes(), *changes.routes(), *views.routes(), *api.probes()],
            HttpLimits(max_body_bytes=MAX_BODY_BYTES),
        )
        self._open = AsyncExitStack()
        self.addresses = Addresses(api="", admin="")

    def max_model_len(self) -> int | None:
        """Returns the longest context of the replicas that are ready, else the model's own."""
        reports = [replica.report for replica in self.replicas.usable()]
        lengths = [report.max_model_len for report in reports if report is not None]
        return max(lengths, default=self._encoder.max_model_len)

    def _room(self) -> int | None:
        """Returns how many more requests the replicas take; None if there is none."""
        room = sum(self.replicas.room().values())
        return room if room or self.replicas.ready() else None

    async def __aenter__(self) -> Self:
        """Finds and watches replicas, and listens.

        Raises:
            ConfigError: A port is taken, or an address is not one of this machine.
        """
        async with AsyncExitStack() as opening:
            opening.callback(self.readers.close)
            opening.callback(self._parsers.close)
            opening.callback(self._rests.close)
            opening.callback(self._prefixes.close)
            if self._tracer is not None:
                opening.push_async_callback(self._tracer.close)
            await opening.enter_async_context(self._client)
            await opening.enter_async_context(self.aborts)
            opening.push_async_callback(self._api.cleanup)
            opening.push_async_callback(self._admin.cleanup)
            settings = self._settings
            api_port = await start_site(
                self._api, settings.host, settings.port, share_port=settings.share_port
            )
            admin_port = await start_site(self._admin, settings.admin_host, settings.admin_port)
            self.addresses = Addresses(
                api=local_url(settings.host, api_port),
                admin=local_url(settings.admin_host, admin_port),
            )
            if self._keeper is not None:
                await self._keeper.load()
                _ = self._supervisor.spawn("index-snapshot", self._keeper.run())
            self._prefixes.start()
            _ = self._supervisor.spawn("replicas", self.replicas.run())
            _ = self._supervisor.spawn("discovery", self._discovery.run())
            _ = self._supervisor.spawn("insight", self.insight.run())
            self._open = opening.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        """Closes the listeners and every connection."""
        await self._open.aclose()

    def reload(self) -> Reloaded:
        """Reads the settings again and takes on what may change while requests run.

        Raises:
            ConfigError: They cannot be read, or contradict; nothing is changed.
        """
        settings, what = reloaded(self._settings, self._reread())
        self._settings = settings
        self.dispatcher.max_attempts = settings.max_attempts
        self.dispatcher.timeout_s = settings.request_timeout_s
        self._attempts.limits = _attempt_limits(settings)
        self.admission.max_waiting = settings.max_queued
        self.admission.timeout_s = settings.queue_timeout_s
        if "log_level" in what.changed:
            logs.setup(settings.log_level)
        self._discovery.set_sources(settings.replica, _names(settings))
        _log.info("config_reloaded", changed=what.changed, refused=what.refused)
        return what

    async def drain(self) -> None:
        """Lets what runs end, for as long as the settings say.

        At first ``/ready`` says 503, and who sends requests all the same is still answered, so
        that whoever balances the load has time to see it. Then nobody can connect any more.
        """
        running = self.dispatcher.running
        running.start_leaving()
        await asyncio.sleep(self._settings.lame_duck_s)
        running.start_draining()
        for site in tuple(self._api.sites):
            await site.stop()
        await running.drain(timeout_s=self._settings.drain_timeout_s)
        if self._keeper is not None:
            await self._keeper.write()


def _names(settings: RouterSettings) -> list[DnsName]:
    return [DnsName.parse(text) for text in settings.replica_dns]


def _attempt_limits(settings: RouterSettings) -> Limits:
    return Limits(first_token_s=settings.first_token_timeout_s, token_s=settings.token_timeout_s)


def _runner(routes: list[web.RouteDef], limits: HttpLimits) -> web.AppRunner:
    app = new_app()
    app.add_routes(routes)
    app.on_response_prepare.append(add_request_id)
    return make_runner(app, limits)
