"""The error tree: every error that a user or a caller can meet, with its HTTP status and OpenAI code.

    PhloemError                    500  internal_error
    ├── InvalidRequestError        400  invalid_value           the request is wrong; names the field
    │   ├── ContextLengthError     400  context_length_exceeded prompt does not fit the context
    │   ├── PoolCapacityError      400  prompt_exceeds_kv_pool  prompt can never fit the KV pool
    │   └── UnsupportedError       400  unsupported_value       valid, but not served here
    ├── AuthenticationError        401  invalid_api_key
    ├── PermissionDeniedError      403  permission_denied
    ├── NotFoundError              404  not_found
    │   └── ModelNotFoundError     404  model_not_found
    ├── PayloadTooLargeError       413  payload_too_large
    ├── QueueFullError             429  queue_full              carries Retry-After
    ├── RequestTimeoutError        408  request_timeout
    ├── StepFailedError            500  step_failed             a forward pass failed; the engine goes on
    ├── EngineUnavailableError     503  engine_unavailable      loading, draining or stopped
    ├── StartupError               exit code 1                  the program cannot start
    │   ├── CheckpointError        exit code 1                  model files are missing, corrupt or unknown
    │   └── UsageError             exit code 2                  a flag or a path is wrong
    └── CacheError                 500  cache_error             a call that breaks the cache's contract
        ├── StaleHandleError                                    cursor or node no longer exists
        └── CapacityError                                       more pages than the pool has

Owns the classes and nothing else; imports nothing of the package.
"""

from __future__ import annotations


class PhloemError(Exception):
    """Base of all errors. The message says what was expected, what came and what to do."""

    http_status = 500
    code = "internal_error"
    error_type = "server_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequestError(PhloemError):
    """The request is wrong; `param` names the field."""

    http_status = 400
    code = "invalid_value"
    error_type = "invalid_request_error"


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for one token in the context."""

    code = "context_length_exceeded"


class PoolCapacityError(InvalidRequestError):
    """The prompt needs more KV slots than the pool has in all."""

    code = "prompt_exceeds_kv_pool"


class UnsupportedError(InvalidRequestError):
    """A valid value that this server does not serve."""

    code = "unsupported_value"


class AuthenticationError(PhloemError):
    """No API key, or a wrong one."""

    http_status = 401
    code = "invalid_api_key"
    error_type = "authentication_error"


class PermissionDeniedError(PhloemError):
    """The key is known but may not do this."""

    http_status = 403
    code = "permission_denied"
    error_type = "permission_error"


class NotFoundError(PhloemError):
    """No such thing at this address."""

    http_status = 404
    code = "not_found"
    error_type = "invalid_request_error"


class ModelNotFoundError(NotFoundError):
    """The model name is not served here."""

    code = "model_not_found"


class PayloadTooLargeError(PhloemError):
    """The request body is over a limit."""

    http_status = 413
    code = "payload_too_large"
    error_type = "invalid_request_error"


class QueueFullError(PhloemError):
    """Too many requests wait already; try again after `retry_after_s` seconds."""

    http_status = 429
    code = "queue_full"
    error_type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RequestTimeoutError(PhloemError):
    """The request passed its deadline before it ended."""

    http_status = 408
    code = "request_timeout"
    error_type = "timeout_error"


class StepFailedError(PhloemError):
    """A forward pass failed. Only the requests in it fail; the engine goes on."""

    code = "step_failed"


class EngineUnavailableError(PhloemError):
    """The engine is loading, draining or stopped."""

    http_status = 503
    code = "engine_unavailable"


class StartupError(PhloemError):
    """The program cannot start; the message names the remedy."""

    exit_code = 1


class CheckpointError(StartupError):
    """Model files are missing, corrupt, contradictory or of an unknown kind."""


class UsageError(StartupError):
    """A flag or a path on the command line is wrong."""

    exit_code = 2


class CacheError(PhloemError):
    """A call that breaks the cache's contract; nothing was changed."""

    code = "cache_error"


class StaleHandleError(CacheError):
    """The cursor or node that the handle names no longer exists."""


class CapacityError(CacheError):
    """More pages were asked for than the pool has."""
