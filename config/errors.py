"""The error of an invalid configuration. Imports no pydantic."""


class ConfigError(ValueError):
    """Invalid configuration; ``messages`` has one text per error."""

    def __init__(self, messages: list[str]) -> None:
        super().__init__("\n".join(messages))
        self.messages = messages
