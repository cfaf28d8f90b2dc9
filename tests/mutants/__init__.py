"""Mutants of the kernel: each breaks one promise, and the tests named beside it have to notice (`make mutants`)."""

from __future__ import annotations

from tests.mutants import (
    api,
    database_sources,
    generations,
    guarantees,
    http,
    injectors,
    model,
    mqtt_sink,
    outboxes,
    page,
    postgres,
    running_graphs,
    runtime,
    sinks,
    sizes,
    sources,
    store,
    views,
    webhook,
    windowing,
)
from tests.mutants.mutant import Mutant


def everything() -> list[Mutant]:
    """All of them, by the part of the kernel that they break."""
    return [
        mutant
        for part in (
            model,
            injectors,
            sources,
            http,
            sinks,
            database_sources,
            mqtt_sink,
            windowing,
            runtime,
            store,
            generations,
            postgres,
            outboxes,
            views,
            sizes,
            guarantees,
            running_graphs,
            webhook,
            api,
            page,
        )
        for mutant in part.MUTANTS
    ]
