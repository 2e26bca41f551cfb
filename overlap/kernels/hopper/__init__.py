"""The Hopper mainloop: TMA loads, wgmma, warp-specialized."""
