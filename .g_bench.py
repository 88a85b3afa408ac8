import torch, sys, json, statistics, triton
from dsv4dist.kernels._triton import indexer_logits as IL, topk as TK, fp8_linear as L, block_matmul as B, grouped_wo_a as W
from dsv4dist.kernels.paged_cache import *
from dsv4dist.kernels.block_table import BlockTable
torch.manual_seed(0)
def graph_us(fns, reps=15):
    for f in fns: f()
    torch.cuda.synchronize()
    s=torch.cuda.Stream(); 
    with torch.cuda.stream(s):
        for f in fns: f()
    torch.cuda.synchronize()
    n=max(1,24//len(fns))
    g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        for _ in range(n):
            for f in fns: f()
    g.replay(); torch.cuda.synchronize(); t=[]
    for _ in range(reps):
        a,b=torch.cuda.Event(True),torch.cuda.Event(True); a.record(); g.replay(); b.record(); b.synchronize(); t.append(a.elapsed_time(b)*1000/(n*len(fns)))
    return statistics.median(t)
a=torch.empty(1<<31,dtype=torch.uint8,device="cuda"); b=torch.empty_like(a)
us=graph_us([lambda:b.copy_(a)]); bw=2*(1<<31)/us/1e6; print(f"copy {bw:.2f} TB/s"); del a,b
def copy_small(n):
    xs=[torch.empty(n//2,dtype=torch.uint8,device="cuda") for _ in range(max(2,(256<<20)//n))]; ys=[torch.empty_like(x) for x in xs]
    return graph_us([lambda x=x,y=y:y.copy_(x) for x,y in zip(xs,ys)][:24])
ONLY=sys.argv[1] if len(sys.argv)>1 else "all"
if ONLY in("all","idx"):
    def idx(T,N,k,same=False,tag=""):
        R=1 if same else T; nb=-(-N//64)
        sets=[]
        for _ in range(1 if R*N*132>80<<20 else 3):
            data=torch.randint(0,126,(R*nb,64*132),dtype=torch.uint8,device="cuda"); data[:,8192:]=torch.ones(64,device="cuda").view(torch.uint8)
            c=PagedCache(data,64,CacheFormat.FP8_INDEX,Fp8Format.OCP); t=BlockTable(torch.randperm(R*nb,device="cuda").view(R,nb).int(),torch.zeros(R,dtype=torch.int32,device="cuda"),64)
            q=torch.randn(T,64,128,device="cuda").to(torch.float8_e4m3fn); w=torch.randn(T,64,device="cuda")
            req=torch.zeros(T,dtype=torch.int64,device="cuda") if same else torch.arange(T,device="cuda")
            lens=torch.full((T,),N,device="cuda"); sets.append((q,w,c,t,req,lens))
        ul=graph_us([lambda s=s:IL.indexer_logits(*s,max_entries=N) for s in sets])
        lg=[IL.indexer_logits(*s,max_entries=N) for s in sets]
        ut=graph_us([lambda l=l,s=s:TK.topk_entries(l,s[5],k) for l,s in zip(lg,sets)])
        ub=graph_us([lambda s=s:IL.select_entries(*s,k,max_entries=N,logits_bytes=1<<40) for s in sets])
        fl=R*N*132/bw/1e6; ops=T*N*64*128*2/1e9
        print(f"index T={T} N={N} k={k} same={same}: logits {ul:.1f} topk {ut:.1f} both {ub:.1f} us; byte floor {fl:.1f} x{ub/fl:.2f}; logits {ops/ul:.0f} TF/s".replace("TF/s","TFLOP/s"))
        return
    idx(16,32768,512); idx(16,32768,1024); idx(1,32768,512); idx(1,262144,512); idx(64,8192,512); idx(128,2048,512); idx(4,262144,1024)
    idx(4096,2048,512,True); idx(4096,8192,512,True)
if ONLY in("all","lin"):
    for K,N in [(4096,1536),(1024,4096),(1024,32768),(8192,4096),(1024,8192),(7168,2048),(1536,8192),(2048,7168)]:
        ws=[((torch.randint(0,126,(N,K),dtype=torch.uint8,device="cuda")).view(torch.float8_e4m3fn),torch.full((-(-N//128),-(-K//128)),120,dtype=torch.uint8,device="cuda")) for _ in range(min(24,max(2,(200<<20)//(N*K))))]
        cs=copy_small(N*K); line=f"lin N={N} K={K} {N*K/1e6:.1f}MB floor {N*K/bw/1e6:.1f} copy of same bytes {cs:.1f}:"
        for M in (1,16,64,128,4096):
            x=torch.randn(M,K,device="cuda").bfloat16(); x8,xs=L.quantise_tokens(x)
            u=graph_us([lambda w=w:L.fp8_linear(x8,w[0],w[1],xs) for w in ws][:6 if M==4096 else 24]); 
            uq=graph_us([lambda w=w:L.fp8_linear(x,w[0],w[1]) for w in ws][:6 if M==4096 else 24])
            line+=f" M{M} {u:.1f}/{uq:.1f}"
            if M==4096:
                one=torch.ones((),device="cuda"); wt=ws[0][0].T
                ur=graph_us([lambda:torch._scaled_mm(x8,wt,one,one,out_dtype=torch.bfloat16)])
                line+=f" ({2*M*N*K/u/1e6:.0f} vs scaled_mm {2*M*N*K/ur/1e6:.0f} TFLOP/s, x{ur/u:.2f})"
        print(line)
    for g in (1,2):
        x=torch.randn(64,g,4096,device="cuda").bfloat16(); ws=[torch.randn(g,1024,4096,device="cuda").bfloat16() for _ in range(12)]
        u=graph_us([lambda w=w:W.grouped_wo_a(x,w) for w in ws]); print(f"wo_a bf16 T64 g{g}: {u:.1f} floor {g*8.39e6/bw/1e6:.1f}")
if ONLY in("sweep",):
    for K,N in [(4096,1536),(1024,4096),(8192,4096),(1024,32768)]:
        ws=[((torch.randint(0,126,(N,K),dtype=torch.uint8,device="cuda")).view(torch.float8_e4m3fn),torch.full((-(-N//128),-(-K//128)),120,dtype=torch.uint8,device="cuda")) for _ in range(min(24,max(2,(200<<20)//(N*K))))]
        for M in (16,128):
            x8,xs=L.quantise_tokens(torch.randn(M,K,device="cuda").bfloat16()); r=[]
            for t in ([B.Tile(1<<30,16,64,4,5),B.Tile(1<<30,16,128,4,4),B.Tile(1<<30,16,32,2,6),B.Tile(1<<30,16,128,8,4)] if M==16 else [B.Tile(1<<30,128,64,4,4),B.Tile(1<<30,64,64,4,4),B.Tile(1<<30,64,128,4,4),B.Tile(1<<30,128,128,8,3)]):
                B._TILES["sm90"]=(t,)
                for sp in (1,2,4,8):
                    r.append((graph_us([lambda w=w:L.fp8_linear(x8,w[0],w[1],xs,num_splits=sp) for w in ws],7),t.rows,t.columns,t.warps,sp))
            r.sort(); print(f"sweep N={N} K={K} M={M}:"," ".join(f"{u:.1f}@{a}x{b}w{c}s{d}" for u,a,b,c,d in r[:8]))
    K,N,M=4096,4096,4096
    for K,N in [(4096,4096),(1024,32768)]:
        w=(torch.randint(0,126,(N,K),dtype=torch.uint8,device="cuda")).view(torch.float8_e4m3fn); s=torch.full((N//128,K//128),120,dtype=torch.uint8,device="cuda")
        x8,xs=L.quantise_tokens(torch.randn(M,K,device="cuda").bfloat16()); r=[]
        for t in [B.Tile(1<<30,128,128,8,4),B.Tile(1<<30,128,128,8,3),B.Tile(1<<30,128,128,4,4),B.Tile(1<<30,256,128,8,3),B.Tile(1<<30,64,128,4,4),B.Tile(1<<30,128,64,4,4)]:
            B._TILES["sm90"]=(t,)
            try: r.append((graph_us([lambda:L.fp8_linear(x8,w,s,xs)],7),t.rows,t.columns,t.warps,t.stages))
            except Exception as e: print("fail",t,str(e)[:80])
        r.sort(); print(f"big N={N} K={K}:"," ".join(f"{2*M*N*K/u/1e6:.0f}T@{a}x{b}w{c}st{d}" for u,a,b,c,d in r))
