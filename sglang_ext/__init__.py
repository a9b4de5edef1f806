"""sglang-ext: sparse attention over host-resident KV for stock SGLang.

Importing this package imports neither torch nor sglang, so that the simulator and the command line work without them.
"""

__version__ = "0.1.0"
