"""The protocol of a link without sockets, threads or clocks: messages go in and out, time comes in as an argument."""
