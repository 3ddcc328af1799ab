"""What a terminal shows."""

import io

from rich.console import Console


def shown(report, width, **options):
    """A report as `rich` prints it on a terminal of this width."""
    file = io.StringIO()
    Console(file=file, width=width, **options).print(report)
    return file.getvalue()
