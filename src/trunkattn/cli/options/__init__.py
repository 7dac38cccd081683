"""Options of the commands: dataclasses, and the command lines made of them. No torch here."""
