"""What a person sees of a stack that starts, runs and stops: a line per event, and on a terminal a spinner below."""

from rich.console import Console
from rich.markup import escape


class Progress:
    """Plain lines where the output is no terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._waiting: list[str] = []
        self._status = console.status("", spinner="dots") if console.is_terminal else None

    def waits(self, name: str) -> None:
        """Something has begun that takes a while."""
        self._waiting.append(name)
        self._spin()

    def done(self, name: str, address: str, seconds: float) -> None:
        self._drop(name)
        place = f"  {escape(address)}" if address else ""
        self._console.print(f"[green]✓[/] {name:<12} {seconds:5.1f} s{place}", highlight=False, soft_wrap=True)

    def died(self, name: str, code: int, wait_s: float, log: str) -> None:
        how = f"was killed by signal {-code}" if code < 0 else f"ended with {code}"
        line = f"[red]✗[/] {name:<12} {how}; starts again in {wait_s:.1f} s; log {escape(log)}"
        self._console.print(line, highlight=False, soft_wrap=True)
        self.waits(name)

    def note(self, text: str) -> None:
        self._console.print(f"  {escape(text)}", highlight=False, soft_wrap=True)

    def summary(self, gateway_urls: list[str], internal_urls: list[str], operator_key: str) -> None:
        """What to do now that everything runs."""
        self._console.print()
        for urls, name in ((gateway_urls, "chat"), (internal_urls, "operators")):
            for url in urls:
                self._console.print(f"{name:<13} {url}", highlight=False)
        self._console.print(f"operator key  {operator_key}", highlight=False, soft_wrap=True)
        self._console.print("Ctrl-C stops everything.", highlight=False)

    def close(self) -> None:
        """Ends the spinner."""
        self._waiting.clear()
        self._spin()

    def _drop(self, name: str) -> None:
        if name in self._waiting:
            self._waiting.remove(name)
        self._spin()

    def _spin(self) -> None:
        if self._status is None:
            return
        if self._waiting:
            self._status.update(f"waiting for {', '.join(dict.fromkeys(self._waiting))}")
            self._status.start()
        else:
            self._status.stop()
