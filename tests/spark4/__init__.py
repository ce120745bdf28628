"""The Spark tests on Spark 4, in an environment that is made for them."""
