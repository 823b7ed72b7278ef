"""What a person sees of `lorafleet bench gateway` and `lorafleet bench keys`."""

from rich.console import Group
from rich.table import Table

from replay.gateway_bench import Result
from replay.key_bench import Obeyed


def gateway_table(results: list[Result]) -> Group:
    (result,) = results
    table = Table(
        "", "per s", "tokens/s", "open", "TTFT p50 ms", "p99", "token p50 ms", "p99", "per chunk", "broken",
        "its core", "others, of a core",
        title=f"one process on core {result.pinned_to}, all else on {_list(result.others_on)}",
    )  # fmt: skip
    for one in result.carried:
        others = ", ".join(f"{name} {share:.0%}" for name, share in one.cores.items() if name != "subject")
        cells = (
            f"{one.rate:g}", f"{one.tokens_s:,.0f}", one.open, one.ttft.p50_ms, one.ttft.p99_ms, one.age.p50_ms,
            one.age.p99_ms, f"{one.tokens_per_chunk:g}", one.broken, f"{one.cores['subject']:.0%}", others,
        )  # fmt: skip
        table.add_row(one.subject, *map(str, cells))
    ttft, token = (", ".join(f"{ms:+g}" for ms in pair) for pair in (result.added.ttft_ms, result.added.token_ms))
    lines = [
        f"added to the bare server's at the peak, p50 and p99: TTFT {ttft} ms, each token {token} ms",
        *(
            f"p99 of a token within {most.p99_within_ms:g} ms: up to {most.rate:g} requests/s, {most.tokens_s:,.0f}"
            f" tokens/s{f'; not at {most.then:g}/s' if most.then else ', the highest tried'}"
            for most in result.most
        ),
        *(
            f"{one.subject}: {one.kib_per_stream:g} KiB per open stream over {one.streams}, {one.empty_mib:g} MiB empty"
            for one in result.memory
        ),
        *(
            f"cold start with {one.customers} customers and {one.adapters} adapters ({result.rows}): {one.seconds:g} s,"
            f" median of {one.starts}"
            for one in result.cold_starts
        ),
    ]
    return Group(table, *lines)


def keys_table(results: list[Obeyed]) -> Table:
    table = Table(
        "change", "gateways", "rounds", "command p50 s", "after its answer p50/worst s", "after its asking", "target s",
        "",
    )  # fmt: skip
    for one in results:
        after, asking = ("/".join(f"{s:g}" for s in pair) for pair in (one.from_answer_s, one.from_asking_s))
        held = "held" if one.held else "missed"
        cells = (one.gateways, one.rounds, one.answer_s, after, asking, one.target_s, held)
        table.add_row(one.change, *map(str, cells))
    return table


def _list(cores: list[int]) -> str:
    return ", ".join(map(str, cores))
