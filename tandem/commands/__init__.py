"""One module per `tandem` command."""
