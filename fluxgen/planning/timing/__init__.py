"""How long a step of one layout takes."""
