"""What the emulator stands on: errors, arithmetic, clocks, the scheduler, the grammar of PTX, settings."""
