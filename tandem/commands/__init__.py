"""One module per `tandem` command. The command line may enter."""

# Control characters, with which a model's text could command the terminal: category Cc except line ends and tabs.
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
