"""What the emulated devices hold: memory, words, barriers, clusters; and who accessed it, to find races."""
