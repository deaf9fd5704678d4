"""The helper process that a sandbox starts: `python -m tandem.containment`."""

from tandem.containment.sandboxed import main

main()
