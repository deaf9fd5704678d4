"""One module per `tandem` command. The command line may enter."""

# Characters by which a model's text would command the terminal: all of Unicode's category Cc but line ends and tabs.
CONTROLS = dict.fromkeys([*range(9), *range(11, 32), *range(127, 160)])
