"""The Python SDK when the gateway cannot answer in time: the one class of
errors that no request can ask for. Every request of this gateway has a
deadline of 50 milliseconds, and says that trying again is no use.
"""

import os
import ssl
import unittest

import openai

TLS = ssl.create_default_context(cafile=os.environ["TOLLGATE_CA"])


class Faults(unittest.TestCase):
    def test_a_deadline_is_an_internal_server_error_and_not_retried(self):
        sent = []
        http = openai.DefaultHttpxClient(verify=TLS, event_hooks={"request": [sent.append]})
        sdk = openai.OpenAI(
            base_url=os.environ["TOLLGATE_URL"] + "/v1",
            api_key=os.environ["TOLLGATE_KEY"],
            http_client=http,
        )
        with self.assertRaises(openai.InternalServerError) as caught:
            sdk.chat.completions.create(
                model="tollgate-demo",
                messages=[{"role": "user", "content": "Count from 1 to 400."}],
            )
        self.assertEqual(caught.exception.status_code, 504)
        self.assertEqual(caught.exception.code, "deadline_exceeded")
        self.assertEqual(len(sent), 1)


if __name__ == "__main__":
    unittest.main(verbosity=2)
