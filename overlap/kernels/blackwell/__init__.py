"""The Blackwell mainloop: TMA loads, tcgen05 products in tensor memory, warp-specialized."""
