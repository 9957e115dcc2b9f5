"""The verifier: graphs before and after are compared, with nothing taken from who changed them."""
