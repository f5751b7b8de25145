"""The nouns of fluxgen: frozen dataclasses and enums without I/O.

Everything else imports from here; this package imports nothing of fluxgen's.
"""
