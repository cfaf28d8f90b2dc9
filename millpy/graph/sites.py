"""Refusals of steps behind a source with a watermark for each site, which only windows by site can use."""

from __future__ import annotations

from millpy.errors import GraphError
from millpy.graph.nodes import InjectorNode, Input, StageNode


def refuse_without_sites(node: StageNode) -> None:
    """Refuse a step that would take records with watermarks by site, and does not work by site.

    Raises:
        GraphError: the step is no window, archive or sink; its key does not name the site; it also takes records whose
            watermark is another; or it takes the output of windows by site, whose order only the least watermark tells.
    """
    if node.archives or node.is_sink:
        return
    for taken in node.inputs:
        producer = taken.producer
        if isinstance(producer, StageNode) and producer.by_site:
            before = repr(producer.name) if producer.name else "windows"
            raise GraphError(
                f"{_named(node)} takes the panes of {before}, which closes windows by site: panes of a site that is"
                " behind would come late",
                hint="write the panes to a table and aggregate them there; or omit watermark_by=",
            )
    if not node.by_site:
        return
    for taken in node.inputs:
        _refuse_input(node, taken, next(taken.site for taken in node.inputs if taken.site is not None))


def _named(node: StageNode) -> str:
    return f"step {node.name!r}" if node.name else "a step without a name"


def _refuse_input(node: StageNode, taken: Input, site: str) -> None:
    if taken.site != site:
        raise GraphError(
            f"{_named(node)} takes {taken.stream.name!r} together with a stream that has watermark_by={site!r}",
            hint=f"give the source of {taken.stream.name!r} watermark_by={site!r}, too; or none of them",
        )
    if not node.windowed:
        raise GraphError(
            f"{_named(node)} takes {taken.stream.name!r}, which has watermark_by={site!r}: only windows close by site",
            hint="window and aggregate the stream; or omit watermark_by=, and one watermark serves every step",
        )
    if site not in taken.fields:
        keys = ", ".join(repr(field) for field in (site, *taken.fields))
        raise GraphError(
            f"windows of {taken.stream.name!r} close by the watermark of {site!r}, which is not in their key",
            hint=f"write key_by({keys})",
        )
    producer = taken.producer
    assert isinstance(producer, InjectorNode)
    was, now = producer.record_type.field_type(site), taken.record_type.field_type(site)
    if was is not now:
        raise GraphError(
            f"field {site!r} is a {was.__name__} in {taken.stream.name!r} and a {now.__name__} behind its operators",
            hint="map the site to another field, and leave this one as it is",
        )
