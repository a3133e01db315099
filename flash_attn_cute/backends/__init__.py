"""The implementations of attention behind the API, each behind the protocol in ``base``."""
