// Ask a running cluster (`make run`) over gRPC: a stream with a deadline, one that is cancelled, and an error.
//
// sh generate.sh && go run . [ADDRESS]
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/status"

	pb "tandem.example/tandem"
)

func main() {
	address := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		address = os.Args[1]
	}
	connection, err := grpc.Dial(address, grpc.WithInsecure())
	if err != nil {
		log.Fatal(err)
	}
	defer connection.Close()
	client := pb.NewLLMServiceClient(connection)
	deadline, end := context.WithTimeout(context.Background(), time.Minute)
	defer end()

	models, err := client.ListModels(deadline, &pb.ListModelsRequest{})
	if err != nil {
		log.Fatal(err)
	}
	most, greedy := uint32(24), float32(0)
	ask := &pb.GenerateRequest{
		Model:    models.Models[0].Id,
		Input:    &pb.GenerateRequest_Prompt{Prompt: "import "},
		Sampling: &pb.SamplingParams{MaxTokens: &most, Temperature: &greedy},
	}
	last, err := stream(deadline, client, ask)
	if err != nil {
		log.Fatal(err)
	}
	fmt.Printf("\n%d tokens by %s\n", last.Usage.CompletionTokens, last.Path.DecodeWorker)

	short, leave := context.WithCancel(deadline)
	ask.Sampling = &pb.SamplingParams{IgnoreEos: true}
	parts, err := client.Generate(short, ask)
	if err != nil {
		log.Fatal(err)
	}
	_, _ = parts.Recv()
	leave() // the workers free what it holds
	for err == nil {
		_, err = parts.Recv()
	}
	fmt.Println("left:", status.Code(err))

	hot := float32(9)
	ask.Sampling = &pb.SamplingParams{Temperature: &hot}
	_, err = client.GenerateUnary(deadline, &pb.GenerateUnaryRequest{Generate: ask})
	fmt.Println("refused:", status.Code(err), status.Convert(err).Message())
}

// stream prints an answer as it is written, and returns its last part.
func stream(ctx context.Context, client pb.LLMServiceClient, ask *pb.GenerateRequest) (*pb.GenerateResponse, error) {
	parts, err := client.Generate(ctx, ask)
	if err != nil {
		return nil, err
	}
	var last *pb.GenerateResponse
	for {
		part, err := parts.Recv()
		if err == io.EOF {
			return last, nil
		}
		if err != nil {
			return nil, err
		}
		fmt.Print(part.Text)
		last = part
	}
}
