"""``python -m mokbench``: the same as the ``mokbench`` command."""

from mokbench.cli import main

main(prog_name="mokbench")
