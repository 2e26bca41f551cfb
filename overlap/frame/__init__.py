"""The path of every call, from a public function's arguments to the launch of a kernel or to XLA.

`call.py` says in which order the modules of this folder come.
"""
