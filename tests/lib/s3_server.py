"""A server of S3's protocol on this machine (moto's), which the test can have refuse requests."""

import threading

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import WSGIRequestHandler, make_server

_ERROR = "<?xml version='1.0'?><Error><Code>{code}</Code><Message>{text}</Message></Error>"
SLOW_DOWN = ("503 Slow Down", "SlowDown", "Please reduce your request rate.")
DENIED = ("403 Forbidden", "AccessDenied", "Access Denied")


class _Quiet(WSGIRequestHandler):
    def log(self, type, message, *args):
        pass


class Server:
    """The server, which answers in threads until `stop`.

    Attributes:
        refuse: a function of method and path that returns one of the errors above, or None.
        refused: how many requests were.
    """

    def __init__(self):
        self._moto = DomainDispatcherApplication(create_backend_app)
        self._server = make_server(
            "127.0.0.1", 0, self._answer, threaded=True, request_handler=_Quiet
        )
        self.environment = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._server.server_port}",
            "AWS_ACCESS_KEY_ID": "of-the-test",
            "AWS_SECRET_ACCESS_KEY": "of-the-test",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_MAX_ATTEMPTS": "1",  # of one request; s3fs and tfpara try again, too
            "AWS_EC2_METADATA_DISABLED": "true",  # no such server is asked
        }
        self.calm()
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def calm(self):
        """Refuses nothing from now on."""
        self.refuse, self.refused = lambda method, path: None, 0

    def stop(self):
        self._server.shutdown()
        self._server.server_close()

    def _answer(self, environ, start_response):
        error = self.refuse(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if error is None:
            return self._moto(environ, start_response)
        self.refused += 1
        environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
        status, code, text = error
        body = _ERROR.format(code=code, text=text).encode()
        start_response(status, [("Content-Type", "text/xml"), ("Content-Length", str(len(body)))])
        # A body after the answer to HEAD would be read as the begin of the next answer.
        return [] if environ["REQUEST_METHOD"] == "HEAD" else [body]
