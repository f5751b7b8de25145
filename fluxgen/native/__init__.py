"""Compiled libraries as Python sees them: layouts read from their headers, arguments, loading.

No Torch here: pointers and streams are integers.
"""
