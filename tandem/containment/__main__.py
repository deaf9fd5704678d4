"""`python -m tandem.containment`: the helper process, which a sandbox starts."""

from tandem.containment.sandboxed import main

main()
