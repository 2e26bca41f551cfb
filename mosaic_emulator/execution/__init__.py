"""How a decoded program runs: its threads, engines that complete later than they are issued, deadlocks, registers."""
