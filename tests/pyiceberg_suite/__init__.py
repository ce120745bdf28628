"""PyIceberg's own integration tests, run against a Lakefeed catalog that is started for them."""
