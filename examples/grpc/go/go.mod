module tandem.example

go 1.19

require (
	google.golang.org/grpc v1.64.0
	google.golang.org/protobuf v1.34.1
)
